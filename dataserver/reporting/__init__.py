"""What commands print and pages show, worked out once for both: of a fleet, a dataset and the steps of a job."""
