"""The state of a training: saving it, resuming from it, and starting from another run's weights.

Why was a checkpoint refused? Every refusal is raised by one of these functions, in this order. A refusal on one rank is
raised on all of them by ``checkpoint.collectives.on_all_ranks``, before any state has changed. Which configuration
belongs to another run, ``run_folder.changes.find_refusal`` says, for the run folder and for a step.

======================================================  ================================================
refusal                                                 raised by
======================================================  ================================================
*the run folder*
belongs to another run, is no run folder, is in use     ``run_folder.opening``
*which step*
no checkpoints at a path                                ``checkpoint.step_folder.find_checkpoints``
the newest step is gone, though ``latest`` names it     ``checkpoint.step_folder.Checkpoints.newest``
no such step                                            ``checkpoint.step_folder.Checkpoints.find``
*the files of the step*
the manifest is damaged, or names an unknown field      ``checkpoint.manifest.read_manifest``
pieces that do not cover a tensor exactly once          ``checkpoint.manifest.Manifest``
a manifest of another step                              ``checkpoint.step_folder.Checkpoints.manifest``
a file is missing, a link or unreadable                 ``checkpoint.files.reading``
a file has another length, XXH3 or SHA-256              ``checkpoint.step_folder.verify_files``
the weights that a step adapts are gone, or others      ``checkpoint.adapted.find_base``
*whether it fits the run* (``resuming.accept``)
other adapters, or none                                 ``adapting.check_adapters``
another configuration, other training data              ``resuming.accept``
another scaler wrote the scaler's state                 ``resuming.scaler_state``
a plugin cannot read the version of its state           ``resuming.find_upgrade``
with ``run.init_from``: weights of another model        ``init_from.refuse_other_model``
*while it is read*
a shard is no intact safetensors file                   ``checkpoint.shard_file.read_header``
a shard contradicts the manifest; no such tensor        ``checkpoint.reader.Reader``
the optimizer needs a field that was not saved          ``resuming.StateReader``
an upgraded field has the wrong shape                   ``resuming.UpgradingReader``
======================================================  ================================================

A save is refused by ``checkpoint.saving.Commit`` (the folder is a link, the step exists), by ``checkpoint.files.lock``
(another job is saving), and by ``checkpoint.manifest.make_manifest`` (the pieces are not the whole state).
"""
