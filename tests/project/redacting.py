"""Redaction functions for `FAKTORY["REDACT"]` in tests."""

SEEN = []
"""Arguments of each call of `hides_all`."""


def hides_all(jobtype, arguments):
    SEEN.append((jobtype, arguments))
    return f"{len(arguments)} arguments of {jobtype}"


def hides_cards(jobtype, arguments):
    if isinstance(arguments, dict):
        return {name: "****" if name == "card" else value for name, value in arguments.items()}
    return arguments


def hides_echo(jobtype, arguments):
    return "hidden" if jobtype == "tests.project.tasks.echo" else arguments


def fails(jobtype, arguments):
    raise ValueError(f"cannot hide {arguments}")


def returns_no_json(jobtype, arguments):
    return object()


def empties(jobtype, arguments):
    arguments.clear()
    return arguments


def hides_lines(jobtype, lines):
    return [line.replace("secret", "****") for line in lines]
