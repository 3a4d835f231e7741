"""Convert this package's PEP 440 version to a semantic version, which clients in other languages parse."""

from __future__ import annotations

import re

_PEP_440 = re.compile(
    r"(?:\d+!)?(?P<release>\d+(?:\.\d+)*)(?:(?P<pre>a|b|rc)(?P<number>\d+))?(?:\.post(?P<post>\d+))?(?:\.dev(?P<dev>\d+))?"
    r"(?:\+(?P<local>[a-z0-9]+(?:\.[a-z0-9]+)*))?"
)
_PRE = {"a": "alpha", "b": "beta", "rc": "rc"}


def semantic(version: str) -> str:
    """Return a normalized PEP 440 version as `MAJOR.MINOR.PATCH[-pre][+build]`: `1.0.0rc1` is `1.0.0-rc.1`.

    An epoch and parts after the third are left out. A text that is no PEP 440 version is returned unchanged.
    """
    match = _PEP_440.fullmatch(version)
    if match is None:
        return version
    # A semantic version has exactly three parts: pad with zeros.
    numbers = [*match["release"].split("."), "0", "0"][:3]
    pre = [f"{_PRE[match['pre']]}.{int(match['number'])}"] if match["pre"] else []
    pre += [f"dev.{int(match['dev'])}"] if match["dev"] else []
    # Semantic versions have no post-releases, so these become build metadata.
    build = [f"post.{int(match['post'])}"] if match["post"] else []
    build += [match["local"]] if match["local"] else []
    core = ".".join(str(int(number)) for number in numbers)
    return core + (f"-{'.'.join(pre)}" if pre else "") + (f"+{'.'.join(build)}" if build else "")
