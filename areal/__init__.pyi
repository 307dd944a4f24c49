from actors.api.runs import LiveRun as LiveRun
from actors.api.runs import RunFailed as RunFailed
from actors.api.runs import join as join
from actors.api.runs import start as start
from actors.api.runs import train as train
from areal.config import Config as Config
from areal.config import dump_config as dump_config
from areal.config import load_config as load_config
from areal.errors import UserError as UserError

__version__: str
