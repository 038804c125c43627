#!/usr/bin/env node
'use strict';
// Prints one JSON line for each microbatch: its header, and the SHA-256 of each decoded tensor.
const { createHash } = require('node:crypto');
const fs = require('node:fs');
const { parseArgs } = require('node:util');
const { DataClient, DataError } = require('./client');

const USAGE = `usage: disttrain-stream --servers HOST:PORT[-PORT][,HOST:PORT ...] --job FILE
    [--module NAME --rank N]   one rank; without them all ranks of all modules
    [--step N] [--microbatch N] where to begin; by default with the job's first step
    [--steps N]                print so many steps only
    [--codec raw|zstd]         zstd by default
    [--give-up-ms N]           how long to try without progress
    [--tls-ca FILE]            authorities of the servers' certificates; with it, connections are encrypted
    [--tls-cert FILE --tls-key FILE]  a certificate for servers that ask for one
    [--token-file FILE]        the token for servers that ask for one`;

const sha256 = ({ buffer, byteOffset, byteLength }) =>
  createHash('sha256')
    .update(new Uint8Array(buffer, byteOffset, byteLength))
    .digest('hex');

const hexed = (key, value) => (value?.type === 'Buffer' ? Buffer.from(value.data).toString('hex') : value);

/** Write a line; waits where the reader is slow. */
const print = (value) => new Promise((resolve) => process.stdout.write(`${JSON.stringify(value, hexed)}\n`, resolve));

/** Print the microbatches of one rank. */
async function printStream(client, module, rank, options) {
  const from = { step: Number(options.step ?? client.job.first_step), microbatch: Number(options.microbatch ?? 0) };
  const end = from.step + Number(options.steps ?? Infinity);
  for await (const { server, header, tensors } of client.stream(module, rank, from)) {
    if (Number(header.step) >= end) return;
    const hashes = Object.entries(tensors).map(([name, tensor]) => [name, sha256(tensor)]);
    await print({ module, rank, server, header, sha256: Object.fromEntries(hashes) });
  }
}

async function main() {
  const names = ['servers', 'job', 'module', 'rank', 'step', 'microbatch', 'steps', 'codec', 'give-up-ms', 'tls-ca', 'tls-cert', 'tls-key', 'token-file'];
  const texts = Object.fromEntries(names.map((name) => [name, { type: 'string' }]));
  const { values } = parseArgs({ options: { ...texts, help: { type: 'boolean', short: 'h' } } });
  if (values.help) return void process.stdout.write(`${USAGE}\n`);
  if (!values.servers || !values.job) throw new DataError('GIVE_UP', USAGE);
  const options = { codecs: values.codec === 'raw' ? [] : ['CODEC_ZSTD'] };
  const files = { ca: 'tls-ca', cert: 'tls-cert', key: 'tls-key' };
  for (const [name, flag] of Object.entries(files)) if (values[flag]) options[name] = fs.readFileSync(values[flag]);
  if (values['token-file']) options.token = fs.readFileSync(values['token-file'], 'utf8').trim();
  if (values['give-up-ms']) options.giveUpMs = Number(values['give-up-ms']);
  const client = new DataClient(values.servers.split(','), options);
  try {
    const job = await client.createJob(fs.readFileSync(values.job, 'utf8'));
    await print({ job });
    const views = values.module
      ? [[values.module, Number(values.rank ?? 0)]]
      : JSON.parse(job.spec).execution.modules.flatMap(({ name, dp }) =>
          Array.from({ length: dp }, (_, r) => [name, r]),
        );
    await Promise.all(views.map(([module, rank]) => printStream(client, module, rank, values)));
  } finally {
    client.close();
  }
}

process.stdout.on('error', (error) => {
  if (error.code !== 'EPIPE') throw error;
  process.exit(0); // the reader has enough
});
main().catch((error) => {
  // Codes that are texts: a file that cannot be read, an unknown flag.
  if (!(error instanceof DataError) && typeof error.code !== 'string') throw error;
  process.stderr.write(`${error.message}\n`);
  process.exitCode = 2;
});
