'use strict';
// A client of DistTrain's data servers, written from protos/ alone: any server addresses in, typed arrays out.
const net = require('node:net');
const os = require('node:os');
const { setTimeout: sleep } = require('node:timers/promises');
const { DirectConnection } = require('./direct');
const { decode, crc32c } = require('./microbatch');
const { Progress } = require('./progress');
const { DataError, DataService, credentialsFor, dataError, showing } = require('./protocol');

if (os.endianness() !== 'LE') throw new Error('tensors travel little-endian; this machine is big-endian');

// A server that vanished is noticed within 7 s. Servers end connections that ping more often than once a second.
const CHANNEL = {
  'grpc.keepalive_time_ms': 2_000,
  'grpc.keepalive_timeout_ms': 5_000,
  'grpc.max_reconnect_backoff_ms': 2_000,
};
const DEFAULTS = {
  meetMs: 5_000, // deadline of the first question to a server, connection included
  callMs: 30_000, // deadline of a call that answers at once
  createMs: 600_000, // deadline of GetOrCreateJob, which sizes whole datasets
  idleMs: 300_000, // longest silence of a stream that is being read
  giveUpMs: 120_000, // how long to try without progress, also before the first answer
  warn: (message) => console.warn(message), // told of each server that refuses, once
  codecs: ['CODEC_ZSTD'], // accepted besides raw, where a server has them
  direct: true, // payloads over a TCP connection beside gRPC, where a server offers one
  ca: undefined, // PEM (a Buffer) of the authorities of servers' certificates: with it, connections are encrypted
  cert: undefined, // PEM of this client's own certificate, for servers that ask for one
  key: undefined, // PEM of its key
  token: undefined, // for servers that ask for one
};
const REMEMBERED_STEPS = 4096;
const MAX_ADDRESSES = 1024;
const VIDEO_GRID = 3; // columns of the grids of videos, one more than those of images

function agree(condition, action, message) {
  if (!condition) throw new DataError(action, message);
}

/** One user's way through the servers: the next one at once, a longer pause after each round, an end after a while. */
class Rotation {
  constructor(client, first) {
    Object.assign(this, { client, position: first % client.servers.length });
    this.progress();
  }

  get server() {
    return this.client.servers[this.position];
  }

  progress() {
    Object.assign(this, { aside: new Set(), failures: new Map(), tried: 0, pauseMs: 100 });
  }

  /** Act on an error; throws it, or one with the messages of all servers, where there is nothing left to try. */
  async failed(cause) {
    const { servers, options } = this.client;
    const error = dataError(cause, this.server.address);
    this.server.info = undefined; // another release may listen there by the next time
    if (error.action === 'GIVE_UP') throw error;
    if (!this.failures.size) this.since = Date.now();
    this.failures.set(this.server.address, error.message);
    if (error.action === 'ANOTHER_SERVER') this.aside.add(this.position);
    const late = Date.now() - this.since > options.giveUpMs;
    if (late || this.aside.size === servers.length) {
      const summary = late ? `no progress for ${options.giveUpMs} ms` : 'every server refuses';
      throw new DataError('GIVE_UP', `${summary}: ${[...this.failures.values()].join('; ')}`, error.reason);
    }
    if (error.action === 'ANOTHER_SERVER' && this.server.refusal !== error.message) {
      this.server.refusal = error.message;
      options.warn(`passed over: ${error.message}`);
    }
    do this.position = (this.position + 1) % servers.length;
    while (this.aside.has(this.position));
    this.tried += 1;
    if (this.tried < servers.length - this.aside.size) return;
    await sleep(this.pauseMs);
    Object.assign(this, { tried: 0, pauseMs: Math.min(2 * this.pauseMs, 5_000) });
  }
}

/** Addresses with each "host:first-last" replaced by one address for each port. */
function expanded(addresses) {
  const found = [];
  for (const address of addresses) {
    const match = /^(.*):(\d{1,5})-(\d{1,5})$/.exec(address.trim());
    const [first, last] = match ? [Number(match[2]), Number(match[3])] : [1, 1];
    if (first < 1 || first > last || last > 65535) {
      throw new DataError('GIVE_UP', `${address} is no range of addresses; host:first-last with ports from 1 to 65535 is required`);
    }
    if (found.length + last - first >= MAX_ADDRESSES) {
      throw new DataError('GIVE_UP', `more than ${MAX_ADDRESSES} addresses are named`);
    }
    for (let port = first; port <= last; port += 1) found.push(match ? `${match[1]}:${port}` : address.trim());
  }
  return found;
}

/** The modality whose libraries made some of a view; empty of images and text. */
function mediaOf(tensors) {
  if (tensors.mel) return 'audio';
  return tensors.grid?.shape[1] === VIDEO_GRID ? 'video' : '';
}

class DataClient {
  /**
   * @param addresses "host:port" of every server of the fleet, or "host:first-last" for a range of ports.
   * @param options overrides DEFAULTS.
   */
  constructor(addresses, options = {}) {
    this.options = { ...DEFAULTS, ...options };
    const { token } = this.options;
    const channel = token ? { ...CHANNEL, interceptors: [showing(token)] } : CHANNEL;
    this.servers = expanded(addresses).map((address) => ({
      address,
      stub: new DataService(address, credentialsFor(address, this.options), channel),
    }));
    this.mediaReferences = {}; // by modality, the first server whose bytes of it were used, with its digest
    this.hashes = new Map(); // step -> plan hash, shared by the streams of all modules and ranks
  }

  /** Close all connections; what is open ends with an error. */
  close() {
    for (const { stub } of this.servers) stub.close();
  }

  /**
   * Make a job known and learn its complete form. Call it once in a run, and hand `spec` to all other processes.
   *
   * @param job the job, complete or as people write it: an object, or JSON text.
   * @returns { job_id, stream_id, spec, first_step, num_steps, filled }, `spec` being JSON text.
   */
  async createJob(job) {
    const text = typeof job === 'string' ? job : JSON.stringify(job);
    const answer = await this.call('GetOrCreateJob', { job_spec_json: text }, this.options.createMs);
    if (this.job?.job_id !== answer.job_id) this.hashes.clear();
    this.job = { ...answer, spec: answer.canonical_job_spec_json };
    return this.job;
  }

  /** One unary call, at the first server that answers it. */
  async call(method, request, ms = this.options.callMs) {
    const rotation = new Rotation(this, 0);
    for (;;) {
      try {
        await this.meet(rotation.server); // soon says so where nobody answers; other calls may take long
        return await this.ask(rotation.server, method, request, ms);
      } catch (error) {
        await rotation.failed(error);
      }
    }
  }

  /**
   * The microbatches of one rank in plan order, to the end of the job, whatever happens to single servers.
   *
   * @param from { step, microbatch, tensors }: where to begin (the job's first step, 0), and the names of the tensors
   *     wanted (all).
   * @yields { server, header, tensors }: tensors are typed arrays by name, each with its `shape`; in the header 64-bit
   *     integers are strings. `tensors` are the caller's to keep.
   */
  async *stream(module, rank, { step = this.job?.first_step, microbatch = 0, tensors = [] } = {}) {
    agree(this.job, 'GIVE_UP', 'call createJob before stream');
    const progress = new Progress((server, ...said) => this.ask(server, 'ReportProgress', ...said));
    const place = { module, rank, step: Number(step), microbatch, tensors, progress };
    const rotation = new Rotation(this, rank);
    progress.waits();
    try {
      for (;;) {
        try {
          for await (const batch of this.follow(rotation.server, place)) {
            rotation.progress();
            progress.takes(Number(batch.header.step));
            yield batch;
            progress.waits();
          }
          if (place.step === Number(this.job.num_steps)) return;
        } catch (error) {
          await rotation.failed(error);
        }
      }
    } finally {
      progress.end();
    }
  }

  /** Read from one server, which may not know the job, or no longer. */
  async *follow(server, place) {
    try {
      yield* this.read(server, place);
    } catch (error) {
      await this.recreate(server, error);
      yield* this.read(server, place);
    }
  }

  /** Bring the job to a server where that is what an error asks for; throws the error where it is not. */
  async recreate(server, error) {
    if (!this.job || dataError(error, server.address).action !== 'CREATE_JOB') throw error;
    server.info = undefined; // it may have been started again, with other libraries
    const request = { job_spec_json: this.job.spec };
    const { job_id: found } = await this.ask(server, 'GetOrCreateJob', request, this.options.createMs);
    agree(
      found === this.job.job_id,
      'ANOTHER_SERVER',
      `${server.address} calls the job ${found}, not ${this.job.job_id}`,
    );
  }

  /** One unary call at one server. */
  ask({ stub }, method, request, ms) {
    return new Promise((resolve, reject) => {
      stub[method](request, { deadline: Date.now() + ms }, (error, answer) =>
        error ? reject(error) : resolve(answer),
      );
    });
  }

  /** Ask a server for its limits, once. */
  async meet(server) {
    server.info ??= await this.ask(server, 'GetServerInfo', {}, this.options.meetMs);
    if (this.reference) this.commit(server, server.info);
    return server.info;
  }

  /**
   * Use bytes of a server: from now on all others have to decode like it. Where the bytes are spectrograms (`of` is
   * audio) or patches of videos (video), they have to make the same of these as well: spectrograms may be of the sound
   * of videos. Those that have none are not asked.
   */
  commit({ address }, info, of = '') {
    const reference = this.reference ?? { address, digest: info.content_digest };
    const digests = { audio: info.audio_digest, video: info.video_digest, sound: info.sound_digest };
    const mediaReferences = { ...this.mediaReferences };
    for (const kind of of === 'audio' ? ['audio', 'sound'] : [of]) {
      if (digests[kind]) mediaReferences[kind] ??= { address, digest: digests[kind] };
    }
    const compared = [['images', info.content_digest, reference]];
    for (const [kind, used] of Object.entries(mediaReferences)) {
      if (digests[kind]) compared.push([kind, digests[kind], used]);
    }
    for (const [kind, found, used] of compared) {
      const message = `${used.address} and ${address} decode ${kind} differently`;
      agree(found === used.digest, 'ANOTHER_SERVER', message);
    }
    Object.assign(this, { reference, mediaReferences }); // a server that is refused decides nothing
  }

  /** Read microbatches from one server, and move `place` past each. Returns at the end of the job, or an idle one. */
  async *read(server, place) {
    const info = await this.meet(server);
    const { module, rank, tensors } = place;
    const request = { job_id: this.job.job_id, module, rank, tensors };
    Object.assign(request, { start_step: place.step, start_microbatch: place.microbatch });
    request.accepted_codecs = this.options.codecs.filter((codec) => info.codecs.includes(codec));
    request.direct = this.options.direct && !place.avoidDirect;
    place.avoidDirect = false;
    request.progress_token = place.progress.open(server);
    const call = server.stub.StreamMicrobatches(request);
    call.on('error', () => {}); // also of a call that is cancelled below, when nobody reads it any more
    const stream = { call, messages: call[Symbol.asyncIterator]() };
    try {
      for (;;) {
        const message = await this.next(stream);
        if (message.end) return this.ended(message.end, place, server);
        if (message.offer) {
          stream.direct = new DirectConnection(call.getPeer(), message.offer, this.secured(server));
          continue;
        }
        agree(message.header, 'ANOTHER_SERVER', `${server.address} sends bytes before a header`);
        if (stream.direct?.error) {
          if (await this.leave(server, stream, place, stream.direct.error)) continue;
          agree(!message.direct, 'RETRY', `${server.address} ended the stream with its data connection`);
        }
        const { header } = message;
        this.check(header, place, info);
        let tensors;
        try {
          const { chunks, end } = await this.payload(message, stream, server);
          if (end) return this.ended(end, place, server);
          tensors = decode(header, chunks);
        } catch (error) {
          if (!message.direct || error.action === 'ANOTHER_SERVER') throw error;
          const again = await this.leave(server, stream, place, error);
          agree(again, 'RETRY', `${server.address} ended the stream with its data connection`);
          continue;
        }
        const batch = { server: server.address, header, tensors };
        this.commit(server, info, mediaOf(tensors));
        const last = header.microbatch + 1 === header.num_microbatches;
        Object.assign(place, last ? { step: place.step + 1, microbatch: 0 } : { microbatch: place.microbatch + 1 });
        yield batch;
      }
    } finally {
      place.progress.close();
      call.cancel();
      stream.direct?.close();
    }
  }

  /** What encrypts a data connection; undefined where gRPC's is plain as well. */
  secured({ address }) {
    const { ca, cert, key } = this.options;
    const name = address.slice(0, address.lastIndexOf(':')).replace(/^\[|\]$/g, '');
    return ca && { ca, cert, key, servername: net.isIP(name) ? undefined : name };
  }

  /** The bytes behind a header, or the end of an idle stream in the middle of them. */
  async payload({ header, direct }, stream, server) {
    if (direct) {
      agree(stream.direct, 'ANOTHER_SERVER', `${server.address} announces a payload on no data connection`);
      return { chunks: [await stream.direct.payload(header)] };
    }
    const chunks = [];
    for (let left = Number(header.total_bytes); left > 0;) {
      const { chunk, end } = await this.next(stream);
      if (end?.reason === 'REASON_IDLE') return { end };
      agree(chunk?.length, 'RETRY', `${server.address} stops ${left} bytes before the end of a microbatch`);
      chunks.push(chunk);
      left -= chunk.length;
    }
    return { chunks };
  }

  /** Give up a data connection; whether the stream begins again at `place`, with chunks. */
  async leave(server, stream, place, { message: cause }) {
    const { step, microbatch } = place;
    const { token, error: unopened } = stream.direct;
    stream.direct.close();
    stream.direct = undefined;
    const { restarted } = await this.ask(server, 'EndDirect', { token, step, microbatch, cause }, this.options.meetMs);
    const told = `payloads of ${server.address} come over gRPC, since the data connection is of no use: ${cause}`;
    if (restarted || unopened) this.options.warn(told); // else the stream has ended, and the connection with it
    place.avoidDirect = !restarted; // else the next stream may end so again
    while (restarted) {
      const { restart, end } = await this.next(stream);
      agree(!end, 'RETRY', `${server.address} ended the stream before it began again`);
      if (restart) break;
    }
    return restarted;
  }

  /** The next message of a stream, which must not be silent for too long while someone waits for it. */
  async next({ call, messages }) {
    const timer = setTimeout(() => call.cancel(), this.options.idleMs);
    try {
      const { done, value } = await messages.next();
      agree(!done, 'RETRY', 'the stream was cut');
      return value;
    } finally {
      clearTimeout(timer);
    }
  }

  /** Check that a stream ended where it should. After an idle end the same server is asked again. */
  ended(end, place, server) {
    const { step, microbatch } = place;
    const right = Number(end.next_step) === step && end.next_microbatch === microbatch;
    if (right && end.reason === 'REASON_IDLE') {
      const at = `step ${step}, microbatch ${microbatch}`;
      agree(place.idleAt !== at, 'RETRY', `${server.address} ended two streams as idle at ${at}`);
      place.idleAt = at;
      return;
    }
    const done = end.reason === 'REASON_END_OF_JOB';
    agree(
      right && (!done || step === Number(this.job.num_steps)),
      'ANOTHER_SERVER',
      `${server.address} ends too early`,
    );
    agree(done, 'RETRY', `${server.address} shuts down`);
  }

  /** Check that a header is the one that is next, of the same plan as all others of its step, and within limits. */
  check(header, { step, microbatch }, info) {
    const { job_id: job, stream_id: stream } = this.job;
    const found = [header.job_id, header.stream_id, Number(header.step), header.microbatch].join(' ');
    const wanted = [job, stream, step, microbatch].join(' ');
    agree(found === wanted, 'ANOTHER_SERVER', `a header of ${found}, where ${wanted} was next`);
    agree(
      microbatch < header.num_microbatches,
      'ANOTHER_SERVER',
      `microbatch ${microbatch} of ${header.num_microbatches}`,
    );
    const raw = header.tensors.reduce((sum, tensor) => sum + Number(tensor.raw_bytes), 0);
    const total = Number(header.total_bytes);
    const fits = raw <= Number(info.stream_bytes) && total <= raw + 64 * header.tensors.length;
    agree(
      fits,
      'ANOTHER_SERVER',
      `a microbatch of ${total} bytes for ${raw}, where the server's limit is ${info.stream_bytes}`,
    );
    const hash = header.plan_hash.toString('hex');
    const known = this.hashes.get(step) ?? hash;
    agree(hash === known, 'GIVE_UP', `step ${step} has the plans ${known} and ${hash}`);
    this.hashes.set(step, hash);
    if (this.hashes.size > REMEMBERED_STEPS) this.hashes.delete(this.hashes.keys().next().value);
  }
}

module.exports = { DataClient, DataError, crc32c, decode };
