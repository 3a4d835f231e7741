"""Number of examples that Hypothesis tries for each test: FAKTORY_TEST_EXAMPLES is `quick` or `thorough` (default)."""

import os

import hypothesis

PROFILES = {"quick": 15, "thorough": 100}


def install():
    """Load the profile. No time limits: the machine may be busy, so the duration of an example is no defect."""
    for name, count in PROFILES.items():
        own = {"max_examples": count, "deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
        hypothesis.settings.register_profile(name, **own)
    hypothesis.settings.load_profile(os.environ.get("FAKTORY_TEST_EXAMPLES", "thorough"))


def examples(thorough):
    """Return the share of this number that the profile allows, at least 1."""
    return max(1, thorough * hypothesis.settings().max_examples // PROFILES["thorough"])
