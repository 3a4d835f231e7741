"""A module that cannot be imported, which settings of tests name."""

import no_such_package  # noqa: F401  (it is missing)
