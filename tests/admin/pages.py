"""What a person reads on a page of the admin."""

import re
from html import unescape


def words(shown):
    """Return the text of a response or of its HTML, without tags and extra spaces."""
    html = shown if isinstance(shown, str) else shown.content.decode()
    return " ".join(unescape(re.sub("<[^>]*>", " ", html)).split())
