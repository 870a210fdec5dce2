"""Pipeline stages: which stage holds each value, and which entry of the schedule runs each op."""
