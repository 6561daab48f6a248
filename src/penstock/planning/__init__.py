"""Planning: simulate schedules, cut models into stages, and search for schedules."""
