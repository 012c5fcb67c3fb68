"""What modules of tests import and workers do not: the fork server imports it once, not each worker anew."""

import hypothesis  # noqa: F401
import pytest  # noqa: F401
