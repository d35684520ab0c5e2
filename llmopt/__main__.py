"""``python -m llmopt`` is the same as the ``llmopt`` script."""

from llmopt.cli import main

if __name__ == "__main__":
    main()
