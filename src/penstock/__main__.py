"""`python -m penstock`: the same as the command `penstock`."""

from penstock.cli.main import run

if __name__ == "__main__":
    run()
