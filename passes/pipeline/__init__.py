"""Pipeline stages: the stage of each value, and the action of the schedule that runs each op."""
