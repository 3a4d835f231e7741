"""JSON texts: cut, scan and change them without decoding them completely."""
