"""`python -m quintet` is `quintet`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # -m has put the working directory first, where any module would be taken for one that the run imports. It goes last
        # where it is that of this package, which need not be installed, and else away. Before every other import.
        here = sys.path.pop(0)
        if __file__ == f"{here}/quintet/__main__.py":
            sys.path.append(here)

    from quintet.cli import main

    sys.exit(main())
