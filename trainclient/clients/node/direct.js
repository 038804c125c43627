'use strict';
// A data connection: payloads over TCP beside gRPC, as DirectOffer in data_service.proto describes it byte by byte.
const net = require('node:net');
const tls = require('node:tls');

const MAGIC = Buffer.from('DTD1');
const CONNECT_MS = 5_000; // until the server has taken the token
const SILENCE_MS = 10_000; // while a frame is due
const FRAME_BYTES = 24;

class DirectConnection {
  /**
   * @param peer "host:port" that the stream's gRPC connection has reached, and no other.
   * @param offer the server's DirectOffer.
   * @param secure { ca, cert, key, servername } where gRPC speaks TLS; then so does the data port.
   */
  constructor(peer, { port, token }, secure) {
    const host = peer.slice(0, peer.lastIndexOf(':')).replace(/^\[|\]$/g, '');
    this.token = token;
    this.socket = secure ? tls.connect({ host, port, ...secure }) : net.connect({ host, port, noDelay: true });
    this.socket.on('error', (error) => (this.cause ??= error.message));
    for (const event of ['readable', 'end', 'close']) this.socket.on(event, () => this.wake?.());
    this.socket.on('timeout', () => this.socket.destroy(new Error('nothing came for too long')));
    this.socket.write(Buffer.concat([MAGIC, token]));
    this.taken = this.take(MAGIC.length, CONNECT_MS).then((answer) => {
      if (!answer.equals(MAGIC)) throw new Error(`${host}:${port} answers ${answer.toString('latin1')}`);
    });
    this.taken.catch((error) => (this.error = error));
  }

  /** The payload whose header says that it comes here; throws an Error that says what is wrong with the connection. */
  async payload({ step, microbatch, crc32c, total_bytes: total }) {
    await this.taken;
    const frame = await this.take(FRAME_BYTES, SILENCE_MS);
    const found = [frame.readBigUInt64LE(0), frame.readUInt32LE(8), frame.readUInt32LE(12), frame.readBigUInt64LE(16)];
    const wanted = [step, microbatch, crc32c, total];
    if (found.join() !== wanted.join()) throw new Error(`a frame of ${found.join()}, where ${wanted.join()} is announced`);
    return this.take(Number(total), SILENCE_MS);
  }

  close() {
    this.socket.destroy();
  }

  /** The next bytes, all of them. */
  async take(count, silenceMs) {
    this.socket.setTimeout(silenceMs);
    for (;;) {
      const bytes = this.socket.read(count);
      if (bytes?.length === count) {
        this.socket.setTimeout(0);
        return bytes;
      }
      if (bytes || this.socket.destroyed || this.socket.readableEnded) throw new Error(this.cause ?? 'it was closed early');
      await new Promise((resolve) => (this.wake = resolve));
    }
  }
}

module.exports = { DirectConnection };
