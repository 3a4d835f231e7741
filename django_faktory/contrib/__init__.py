"""Optional parts, one per extra of pip. Nothing below this layer imports them."""
