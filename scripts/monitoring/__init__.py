"""The Grafana dashboard and the alert rules of a fleet: what they show, as data, and how it is written."""
