"""Write a corpus of random walks in Megatron's format: corpus.py PREFIX. For your own text, use its tools/preprocess_data.py."""

import sys

import torch
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder

draw = torch.Generator().manual_seed(0)
builder = MMapIndexedDatasetBuilder(f"{sys.argv[1]}.bin")
for _ in range(40):
    builder.add_item(torch.randint(1, 4, (1000,), generator=draw).cumsum(0) % 127)
    builder.end_document()
builder.finalize(f"{sys.argv[1]}.idx")
