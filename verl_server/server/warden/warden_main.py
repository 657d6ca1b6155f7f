"""First code of a warden process: `python -I .../warden_main.py`.

The option `-I` keeps the current folder, PYTHONPATH and user packages out of a process that must not fail. The package
is then found by the location of this file, whether or not it is installed.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.normpath(os.path.join(here, "..", "..", "..")))  # the folder of `verl_server`
    import verl_server  # noqa: F401 - later imports of its modules do not use sys.path

    del sys.path[0]  # it must not hide modules of the standard library
    from verl_server.server.warden import warden

    warden.main()


if __name__ == "__main__":
    main()
