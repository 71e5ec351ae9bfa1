"""Shows a function that a model wrote over a dataset of Ray Data: each batch runs in a sandbox of its own."""

import ray

from toolcell.integrations.ray_data import SandboxedFunction

SOURCE = """
def count_words(batch):
    return {"text": batch["text"], "words": [len(text.split()) for text in batch["text"]]}
"""

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
texts = ray.data.from_items([{"text": "the quick brown fox"}, {"text": "jumps"}])
counted = texts.map_batches(SandboxedFunction, fn_constructor_args=(SOURCE, "count_words"), concurrency=1)
for row in sorted(counted.take_all(), key=lambda row: -row["words"]):
    print(row)
ray.shutdown()
