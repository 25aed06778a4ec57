"""`python -m hf_attn_backends.gate.worker DEVICE`: measure the classes named on standard input.

One JSON list `[dtype, head_dim, visibility, features]` a line in, one JSON object (`ClassResult`)
a line out. Whatever else is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> int:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    device = sys.argv[1]

    from hf_attn_backends.call import CallClass
    from hf_attn_backends.gate.measure import measure_class

    for line in sys.stdin:
        result = measure_class(CallClass(*json.loads(line)), device)
        answers.write(json.dumps(result.to_dict()) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
