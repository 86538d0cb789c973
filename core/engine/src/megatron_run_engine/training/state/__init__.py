"""The state of a training: saving it, resuming from it, and starting from another run's weights.

Why was a checkpoint refused? The first column has the words of a message that never vary: search for them here. The
second says what raises it: a function, or the class of which several do. Behind a colon are words of the reason, where
several refusals begin alike. The groups are in the order in which they are asked; *it fits the run* is for a run that
resumes or branches, and the group before the adapters for one with ``run.init_from``. A test compares the rows with the
places that raise.

What one rank refuses, ``checkpoint.collectives`` raises on all of them as a ``CheckpointError``. No state has changed
until values are read; from there on some may have. ``init_from.check_source`` asks first about the source of
``run.init_from`` or ``run.branch_from`` (step, manifest, model and tokenizer, or whether it fits), before a run folder
is opened: in the launcher, under torchrun and Slurm on every rank, and in ``--dry-run``. Which configuration belongs to
another run, ``run_folder.changes.find_refusal`` says, for the run folder and for a step.

=========================================  ======================================================
words of the message                       raised by
=========================================  ======================================================
*the run folder* (an ``InputError``)
is not a run folder                        ``run_folder.opening._refusal``
is in use                                  ``run_folder.lock.FolderLock._in_use``
belongs to another run                     ``run_folder.opening._check_same_run``
ends before step                           ``run_folder.length._compare``
*the step*: rank 0 chooses it
no checkpoints in                          ``checkpoint.step_folder.find_checkpoints``
is missing                                 ``checkpoint.step_folder.Checkpoints.newest``
there is no checkpoint                     ``checkpoint.step_folder.Checkpoints.find``
*its files*: each rank verifies a share
cannot be read                             ``checkpoint.files.reading``
is not the file itself                     ``checkpoint.files.reading``
is too large                               ``checkpoint.files.read_whole``
is damaged: it is not a whole manifest     ``checkpoint.manifest.decode_manifest``
is damaged: its SHA-256 is not the one     ``checkpoint.manifest.decode_manifest``
is of a newer format                       ``checkpoint.manifest.decode_manifest``
cannot be used                             ``checkpoint.manifest.decode_manifest``
is not what its name says                  ``checkpoint.step_folder.Checkpoints.manifest``
is damaged: it has                         ``checkpoint.step_folder.check_length``
is damaged: is not that of the manifest    ``checkpoint.step_folder._verify_file``
*its copies in memory*: a folder of each host
names no folder of this host               ``checkpoint.memory_folder.memory_folder``
there is no folder                         ``checkpoint.memory_folder.memory_folder``
cannot hold steps in memory                ``checkpoint.memory_folder.unusable``
is for the steps of the run in             ``checkpoint.memory_home.MemoryHome.check``
holds no steps in memory any more          ``checkpoint.memory_home.MemoryHome.token``
is of another run                          ``checkpoint.memory_home.MemoryHome._own_manifest``
is damaged: its XXH3                       ``checkpoint.exchange._receive``
is not what it was, and cannot be removed  ``checkpoint.survivors.Survivors._remove``
is not what it was, and no other           ``training.state.memory_tier.MemoryTier.find``
is not on disk, where one is read          ``checkpoint.memory_home.not_on_disk``
in memory cannot be used, and no other     ``training.state.memory_tier.MemoryTier.find``
could not be saved in memory               ``checkpoint.memory_saver.MemorySaver``
*its model and tokenizer* (``run.init_from``)
the data has another tokenizer             ``training.state.same_model.check_tokenizer``
are of another model                       ``training.state.same_model.refuse_other_model``
*its adapters*, and the weights under them
belongs to a run with other adapters       ``training.state.adapting.check_adapters``
holds adapters of random weights           ``checkpoint.adapted.find_base``
adapts are not in                          ``checkpoint.adapted.find_base``
*it fits the run* (``resuming.accept``)
belongs to another run                     ``training.state.resuming.accept``
the training data is not what it was       ``training.state.resuming.accept``
holds state of version                     ``training.state.resuming.find_upgrade``
holds the state of                         ``training.state.resuming.scaler_state``
cannot read the state of version           ``training.state.resuming.find_upgrade``
cannot be resumed                          ``training.numbers.Progress.restored``
nothing is left to train                   ``training.state.init_from.check_source``
*values are read*: state may have changed
is no intact safetensors file              ``checkpoint.shard_file._broken``
cannot be read                             ``checkpoint.reader.TensorFile.__init__``, ``checkpoint.reader.Reader.read``
holds no                                   ``checkpoint.reader.Reader._find``
does not hold what the manifest says       ``checkpoint.reader.Reader._piece``
merged weights have no                     ``checkpoint.adapted.MergedReader.read``
the checkpoint has no                      ``training.state.reading.StateReader.__call__``
is not what it should be                   ``training.state.reading.UpgradingReader.read``
has no state, but the checkpoint holds     ``contracts.scaler.Scaler.load_state_dict``, or that of a plugin
newer steps could not be set aside         ``checkpoint.saving.Saver._move``
*a save*
cannot hold checkpoints                    ``checkpoint.saving.Commit.make_home``
exists                                     ``checkpoint.saving.Commit.begin``
are being saved by another job             ``checkpoint.files.lock``
the ranks disagree on the                  ``checkpoint.saving.joined``
its pieces are not the whole state         ``checkpoint.manifest.make_manifest``
could not be saved                         ``checkpoint.saving.Saver``
could not be removed                       ``checkpoint.saving.Saver._finish``
*elsewhere*: generating, and importing
are of another model                       ``megatron_run_inference.network._check``
is not read                                ``checkpoint.files.followed``, ``checkpoint.kept_files.read_own``
is not beside it                           ``checkpoint.kept_files.tokenizer_of``
is not exported                           ``checkpoint.kept_files.exported_tokenizer``
=========================================  ======================================================
"""
