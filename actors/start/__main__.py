"""What `run.py` does, as a program by its path. As there, a program in the working folder hides no module of ours."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
sys.path[:1] = [] if ROOT in sys.path else [ROOT]

from actors.start.run_command import main  # noqa: E402

sys.exit(main())
