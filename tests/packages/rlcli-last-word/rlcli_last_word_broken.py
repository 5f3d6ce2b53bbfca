"""A module that does not import, beside one that does."""

import a_module_that_nobody_has  # noqa: F401
