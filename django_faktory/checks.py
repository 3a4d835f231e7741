"""System checks; filled in with the settings they check."""
