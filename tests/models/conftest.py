"""Small models in double precision, and packed random inputs for them."""

import torch

torch.set_num_threads(1)
