"""Code for every interpreter that starts with this folder on its path; see stand_in.py."""

import stand_in

stand_in.install()
