"""A module that fails to import, in a package with one that does not."""

import a_module_that_nobody_has  # noqa: F401
