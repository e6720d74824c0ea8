"""`python -m tools.figures` (`make figures`)."""

from tools.figures.pages import main

if __name__ == "__main__":
    main()
