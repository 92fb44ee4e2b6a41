"""The training engine on megatron-core: one rank of a model in a layout.

Start reading at `engine.engine`. Importing this package imports neither torch nor megatron-core.
"""

import logging
import warnings

# What megatron-core and torch say at import and at first use about parts that are not installed or will be renamed:
# a screenful in every rank's log, which is what a user reads when a rank dies.
warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
