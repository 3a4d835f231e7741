"""Call any verbs in any order, against the plain model. `make soak` runs many more steps."""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.examples import examples
from tests.settings import KIND
from tests.store.model.machine import StoreComparedWithModel

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(1200)]

PHASES = [Phase.generate, Phase.shrink] if "FAKTORY_MODEL_SHRINK" in os.environ else [Phase.generate]
"""Shrinking a failed walk takes minutes, so it must be requested."""

STEPS = int(os.environ.get("FAKTORY_MODEL_STEPS") or examples(3000 if KIND == "sqlite" else 1000))
"""10,000 steps on all three databases together."""
PARTS, WALK = 5, 50


@pytest.mark.parametrize("part", range(PARTS))
def test_the_store_behaves_like_its_model(part):
    """Run in parts, so that test processes can share them. Each walk begins with an empty store."""

    class Part(StoreComparedWithModel):
        steps = 0

    wanted = settings(
        max_examples=max(1, STEPS // PARTS // WALK // 4),
        stateful_step_count=WALK,
        suppress_health_check=list(HealthCheck),
        phases=PHASES,
        report_multiple_bugs=False,
        database=None,
    )
    while Part.steps < STEPS // PARTS:  # some walks are shorter than WALK steps
        run_state_machine_as_test(Part, settings=wanted)
