"""`millrace audit` for spark-submit, which runs files and no installed programs.

`millrace audit package` puts a copy of this file beside the archive:
`spark-submit … millrace-audit.py run --config audit.yaml`.
"""

import sys

from millrace.deploy.cli import main

if __name__ == "__main__":
    main(["audit", *sys.argv[1:]])
