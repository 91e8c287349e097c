"""One process of a world: runs a list of runs, each into its folder (started by torchrun).

    torchrun --nproc-per-node 2 worker.py jobs.json

jobs.json is a list of {"out": folder, "settings": [key=value …], "until": stage or null}. One start
for many runs: importing torch and transformers takes longer than a tiny run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from dualsft.config import settings
from dualsft.distributed.world import joined
from dualsft.runs import pipeline
from dualsft.system.progress import Reporter


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    with joined(use_cuda=False) as world:
        print(f"worker {world.rank} is process {os.getpid()};", flush=True)
        for job in jobs:
            config = settings.load(None, job["settings"])
            say = (lambda line: print(line, flush=True)) if world.main else (lambda _: None)
            pipeline.run(config, job["out"], job.get("until"), Reporter(say))


if __name__ == "__main__":
    main()
