"""The command line: `dataserver index | lint | plan | simulate | fit | towers | serve`."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from dataserver.cli.fit import fit_costs
from dataserver.cli.index import index
from dataserver.cli.lint import lint
from dataserver.cli.plan import plan
from dataserver.cli.serve import serve
from dataserver.cli.simulate import simulate
from dataserver.cli.towers import towers
from dataserver.serving.errors import DataServiceError

_log = logging.getLogger(__name__)

DESCRIPTION = "CPU side of a multimodal training job: shards in, balanced steps out over gRPC."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; what the user can put right is one line on stderr and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    commands: dict[str, Callable[..., Any]] = {
        "index": index,
        "lint": lint,
        "plan": plan,
        "simulate": simulate,
        "fit": fit_costs,
        "towers": towers,
        "serve": serve,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="dataserver",
            description=DESCRIPTION,
            args=arguments,
            config=(tyro.conf.DisallowNone,),
        )
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, DataServiceError) as error:
        _log.debug("failed", exc_info=error)
        print(f"dataserver: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dataserver: interrupted", file=sys.stderr)
        return 130
    return 0
