'use strict';
// Says to the server of a stream how far its reader is: what was sent may wait in buffers of gRPC and of this client.
const { randomBytes } = require('node:crypto');

const SAY_EVERY_MS = 1_000;
const ANSWER_MS = 5_000;
const UNIMPLEMENTED = 12;

/** What the reader of one view has taken, for the server that it reads from. */
class Progress {
  /** @param report calls ReportProgress: (server, request, ms) => a promise. */
  constructor(report) {
    Object.assign(this, { report, waitedMs: 0, said: '' });
    this.timer = setInterval(() => this.look(), SAY_EVERY_MS).unref();
  }

  /** Report to a server from now on, about the stream of the token that this gives. */
  open(server) {
    this.server = server;
    this.token = randomBytes(16);
    return this.token;
  }

  /** Report no more until another stream begins. */
  close() {
    this.server = undefined;
  }

  end() {
    clearInterval(this.timer);
  }

  /** The reader asks for a microbatch. */
  waits() {
    this.since = performance.now();
  }

  /** The reader takes a microbatch. */
  takes(step) {
    this.waitedMs += performance.now() - this.since;
    Object.assign(this, { step, since: undefined });
  }

  /** Report a step that is new, and how long the reader waits while it does; what fails is said with the next look. */
  async look() {
    const { server, token, step, since } = this;
    const now = `${token?.toString('hex')} ${step}`;
    if (!server || step === undefined || server.silent || this.asking || (now === this.said && since === undefined)) return;
    const ms = this.waitedMs + (since === undefined ? 0 : performance.now() - since);
    const waited = { seconds: Math.floor(ms / 1e3), nanos: Math.floor((ms % 1e3) * 1e6) };
    this.asking = true;
    try {
      await this.report(server, { progress_token: token, step, waited }, ANSWER_MS);
      this.said = now;
    } catch (error) {
      if (error.code === UNIMPLEMENTED) server.silent = true;
    } finally {
      this.asking = false;
    }
  }
}

module.exports = { Progress };
