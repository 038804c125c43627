"""What only one layout knows of the trainer's processes, their exchange of rows, and the search for degrees.

A layout is a folder of this package, named by the job's `execution.layout.kind` and by a line of `registry.LAYOUTS`. It
has three modules, which the rest of the trainer asks without knowing which layout it is:

- `topology`: `topology(execution)`, the processes of a job and how rows move between them
  (`topology.process_grid.Topology`);
- `exchange`: `chunk_ends(process, modules)`, what the chunks of a process receive and send with (`interface`);
- `degrees`: `DEGREES`, how `trainclient orchestrate` finds its degrees (`orchestrate.choice.LayoutDegrees`).

What a step does, operation by operation, is one function for servers and trainer, in the folder of the same name in
`dataserver/planning/layouts/`. `shared/` has what several layouts use.
"""
