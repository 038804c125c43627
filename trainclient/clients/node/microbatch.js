'use strict';
// The bytes of a microbatch: checked, decoded, and seen as typed arrays.
const zstd = require('fzstd');
const { DataError } = require('./protocol');

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0x82f63b78 : value >>> 1;
  return value;
});

/** CRC-32C of bytes: an unsigned 32-bit integer, 0 for no bytes. */
function crc32c(bytes) {
  let value = 0xffffffff;
  for (let i = 0; i < bytes.length; i++) value = CRC_TABLE[(value ^ bytes[i]) & 0xff] ^ (value >>> 8);
  return (value ^ 0xffffffff) >>> 0;
}

// JavaScript has no 16-bit floats: those are handed out as their bits.
const ARRAYS = {
  DATA_TYPE_UINT8: Uint8Array,
  DATA_TYPE_INT32: Int32Array,
  DATA_TYPE_INT64: BigInt64Array,
  DATA_TYPE_FLOAT16: Uint16Array,
  DATA_TYPE_BFLOAT16: Uint16Array,
  DATA_TYPE_FLOAT32: Float32Array,
};

/** Bytes that got lost or changed on the way are asked for again; rules that a server breaks, it will break again. */
function arrived(condition, message) {
  if (!condition) throw new DataError('RETRY', message);
}
function rule(condition, message) {
  if (!condition) throw new DataError('ANOTHER_SERVER', message);
}

/** Decode one zstd frame of `raw` bytes. */
function decompress(name, bytes, raw) {
  try {
    return zstd.decompress(bytes, new Uint8Array(raw));
  } catch (error) {
    throw new DataError('ANOTHER_SERVER', `tensor ${name} is no zstd frame of ${raw} bytes: ${error.message}`);
  }
}

/** One tensor of `body`, a Uint8Array that begins at a multiple of 8: a typed array with a `shape`. */
function decodeTensor(entry, body) {
  const type = ARRAYS[entry.dtype];
  rule(type, `tensor ${entry.name} has the unknown type ${entry.dtype}`);
  const shape = entry.shape.map(Number);
  const [offset, encoded, raw] = [entry.offset, entry.encoded_bytes, entry.raw_bytes].map(Number);
  rule(offset % 64 === 0 && offset + encoded <= body.length, `tensor ${entry.name} lies outside its microbatch`);
  rule(raw === shape.reduce((a, b) => a * b, type.BYTES_PER_ELEMENT), `tensor ${entry.name} has a wrong size`);
  let bytes = body.subarray(offset, offset + encoded);
  if (entry.codec === 'CODEC_ZSTD') bytes = decompress(entry.name, bytes, raw);
  else rule(entry.codec === 'CODEC_RAW', `tensor ${entry.name} has the codec ${entry.codec}, which was not asked for`);
  rule(bytes.length === raw, `tensor ${entry.name} has ${bytes.length} bytes, ${raw} were announced`);
  return Object.assign(new type(bytes.buffer, bytes.byteOffset, raw / type.BYTES_PER_ELEMENT), { shape });
}

/**
 * The tensors of a microbatch, by name.
 *
 * @param header its MicrobatchHeader.
 * @param chunks the bytes that followed, as they came.
 * @throws DataError if the bytes are not those that the header announces.
 */
function decode(header, chunks) {
  const body = new Uint8Array(Number(header.total_bytes));
  let done = 0;
  for (const chunk of chunks) {
    arrived(done + chunk.length <= body.length, `more bytes than the ${body.length} that the header announces`);
    body.set(chunk, done);
    done += chunk.length;
  }
  arrived(done === body.length, `${done} of ${body.length} bytes`);
  const checksum = crc32c(body);
  arrived(checksum === header.crc32c, `bytes with CRC-32C ${checksum}, where the header says ${header.crc32c}`);
  return Object.fromEntries(header.tensors.map((entry) => [entry.name, decodeTensor(entry, body)]));
}

module.exports = { crc32c, decode };
