"""Check that planted defects can be applied, without applying them: `make planted` does that."""

from pathlib import Path

import pytest

from scripts.plants import PLANTS

pytestmark = pytest.mark.core

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_each_planted_defect_matches_the_code_exactly_once(plant):
    """If you change the code that a plant replaces, update the plant in `scripts/plants.py`."""
    assert (ROOT / plant.path).read_text(encoding="utf-8").count(plant.old) == 1
    assert plant.old != plant.new
    assert (ROOT / plant.tests[0]).is_file()
