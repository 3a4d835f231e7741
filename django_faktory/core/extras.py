"""Text of errors about a package that only an extra of this package installs. Pure."""


def explain_missing(part: str, package: str, extra: str) -> str:
    """Return one line: what needs the package, and what installs it."""
    return f'{part}: {package} is not installed: pip install "django-faktory[{extra}]"'
