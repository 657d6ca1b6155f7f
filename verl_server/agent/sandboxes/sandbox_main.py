"""First code of a local sandbox: `python -I .../sandbox_main.py`, with the path of a new folder as argument.

Standard input is a socket of the trainer.

The program makes the folder of the sandbox, starts the command server, in new namespaces if the kernel allows them,
waits for its end and removes the folder, also when the trainer was killed. It imports the standard library only; see
`server/warden/warden_main.py`.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.normpath(os.path.join(here, "..", "..", "..")))  # the folder of `verl_server`
    import verl_server  # noqa: F401 - later imports of its modules do not use sys.path

    del sys.path[0]  # it must not hide modules of the standard library
    from verl_server.agent.sandboxes import command_server

    command_server.main(sys.argv[1])


if __name__ == "__main__":
    main()
