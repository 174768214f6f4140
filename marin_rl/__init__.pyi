from marin_rl.analysis import scan_batches as scan_batches
from marin_rl.analysis import scan_dispositions as scan_dispositions
from marin_rl.analysis import scan_evals as scan_evals
from marin_rl.analysis import scan_metrics as scan_metrics
from marin_rl.analysis import scan_rollouts as scan_rollouts
from marin_rl.analysis import scan_scores as scan_scores
from marin_rl.analysis import sql as sql
from marin_rl.api.sampling import LLM as LLM
from marin_rl.api.sampling import Completion as Completion
from marin_rl.api.sampling import Engine as Engine
from marin_rl.api.training import Learned as Learned
from marin_rl.api.training import Round as Round
from marin_rl.api.training import TrainingRun as TrainingRun
from marin_rl.api.training import learn as learn
from marin_rl.api.training import run as run
from marin_rl.config import Config as Config

__version__: str
