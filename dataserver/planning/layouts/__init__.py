"""How modules share devices and time: a folder for each layout. `job.spec.AnyLayout` lists their options."""
