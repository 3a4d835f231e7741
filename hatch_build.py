"""Complete the metadata of wheel and sdist: what contains the address of the project, from one constant.

`[tool.hatch.metadata.hooks.custom]` in pyproject.toml has the address. The README's relative links lead to files of the
repository, and have no meaning where an index of packages shows it.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]+)\]\(((?![a-z]+:|#)[^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Set `urls` and `readme`, which are dynamic."""

    def update(self, metadata):
        """Add both to the metadata of the project."""
        base, tag = self.config["repository"], f"v{metadata['version']}"
        metadata["urls"] = {
            "Source": base,
            "Documentation": f"{base}/blob/{tag}/docs/index.md",
            "Changelog": f"{base}/blob/{tag}/CHANGELOG.md",
            "Issues": f"{base}/issues",
            "Security": f"{base}/security/policy",
        }
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, base, tag)}


def with_absolute_links(text, base, tag):
    """Return the text with relative links and pictures at this tag of the repository."""
    return LINK.sub(lambda one: f"{one[1]}[{one[2]}]({base}/{'raw' if one[1] else 'blob'}/{tag}/{one[3]})", text)
