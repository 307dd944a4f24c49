from actors.api.live_run import LiveRun as LiveRun
from actors.api.live_run import join as join
from actors.api.live_run import start as start
from actors.api.live_run import train as train
from actors.api.run_process import RunFailed as RunFailed
from areal.base.errors import UserError as UserError
from areal.config import Config as Config
from areal.config import dump_config as dump_config
from areal.config import load_config as load_config

__version__: str
