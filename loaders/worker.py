"""What every worker process of a loader begins with: it ends when the process that started it does, however that ended.

torch's workers look every few seconds whether ``getppid`` is still what it was. Under ``forkserver``, which is the default from
Python 3.14 on, their parent is the server, and a trainer that was killed leaves them, and with them the server, for ever.

    DataLoader(dataset, num_workers=2, worker_init_fn=end_with_trainer)
"""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_trainer(worker: int) -> None:
    """torch's ``worker_init_fn``: a thread that costs nothing waits for the trainer's end, and ends this process then."""
    threading.Thread(target=_end_after_trainer, name="equipoise-trainer-watch", daemon=True).start()


def _end_after_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "a worker was started by multiprocessing"
    trainer.join()
    os._exit(1)  # whatever it is at: nobody waits for it any more
