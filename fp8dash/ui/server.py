"""The web process: Streamlit's own server, which asks nobody outside this machine anything.

`python -m fp8dash.ui.server run app.py` is `streamlit run app.py`, without the look-up of this machine's address on the
internet that Streamlit makes where a page is opened from an origin it does not know, or where it listens everywhere.
"""

from streamlit import net_util
from streamlit.web import cli


def main() -> None:
    """Runs Streamlit's command line; the machine has no address outside."""
    net_util.get_external_ip = lambda: None
    cli.main(prog_name="streamlit")


if __name__ == "__main__":
    main()
