"""The Python files of an export as a package, such as ``tests.tools.exported_code.modeling_moh``.

They lie in a directory of their own, as users have them, until this process ends.
"""

import tempfile
from pathlib import Path

from tools.hf.convert.shipped_code import LANGUAGE, write_code

DIRECTORY = tempfile.TemporaryDirectory()
write_code(LANGUAGE, Path(DIRECTORY.name))
__path__ = [DIRECTORY.name]
