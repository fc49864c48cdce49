"""Option of the regression checks."""


def pytest_addoption(parser):
    parser.addoption(
        "--store-baselines",
        action="store_true",
        help="write bench/baselines/<gpu>.json from this run",
    )
