"""Finding the beam shape that is fastest on this machine. To come: nothing is tuned yet."""
