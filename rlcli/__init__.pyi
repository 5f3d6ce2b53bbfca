from rlcli.api.evaluate import evaluate as evaluate
from rlcli.api.run import Run as Run
from rlcli.api.train import train as train
from rlcli.errors import RlcliError as RlcliError
from rlcli.types import Outcome as Outcome
from rlcli.types import Verdict as Verdict
from rlcli.types import VerifyRequest as VerifyRequest

__version__: str
