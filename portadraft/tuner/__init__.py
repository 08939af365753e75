"""Finding the beam shape that is fastest on this machine.

recordings  the target's own generations, with their features
acceptance  tokens per step of every shape, by replay; no device in it
costs       milliseconds of a step on a device, measured or given as a curve (devices)
predict     the two together: tokens per second of every shape
search      where the rest of the time budget is measured end to end
config      what is asked for
outcome     what was found
run         all of it: what `portadraft tune` does
"""
