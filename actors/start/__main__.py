"""`run.py` as a program by path. As with `run.py`, a program in the working folder hides no module of this project."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
sys.path[:1] = [] if ROOT in sys.path else [ROOT]

from areal.base.errors import UserError  # noqa: E402
from areal.base.processes import check_packages  # noqa: E402

try:
    check_packages()  # PYTHONPATH may have such a program, too
except UserError as error:
    sys.exit(print(error, file=sys.stderr) or 2)

from actors.start.run_command import main  # noqa: E402

sys.exit(main())
