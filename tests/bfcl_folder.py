"""The folder of the installed bfcl-eval. A test module that imports this is skipped where the package is missing."""

from __future__ import annotations

import pytest

from seal_jax.envs.bfcl import package

try:
    FOLDER = package.package_folder()
    package.tool_class("MathAPI")  # its tools have dependencies of their own
except ImportError as missing:
    pytest.skip(str(missing), allow_module_level=True)
